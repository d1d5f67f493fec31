"""What a route shows: several reads as one look at the store, texts within bounds, tokens with their texts."""
