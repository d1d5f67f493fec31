"""The contents of answers: several reads in one transaction, texts within limits, tokens with their texts."""
