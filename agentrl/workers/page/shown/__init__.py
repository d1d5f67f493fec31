"""The contents of responses: several reads in one transaction, shortened texts, tokens with their texts."""
