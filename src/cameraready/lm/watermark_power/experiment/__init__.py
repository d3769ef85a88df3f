"""What the study tries: simulated texts, human text, texts that real models write, and the claims of our own."""
