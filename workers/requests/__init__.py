"""What a person asks for, checked and made ready before anything is written."""
