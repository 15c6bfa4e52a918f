"""What is done with a vision model besides training it: so far, reading its images."""
