"""What is done with a vision model besides training, and the images it reads."""
