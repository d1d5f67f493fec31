"""What a model is: looked up, loaded, made to train, scored; its weights as other programs read them."""
