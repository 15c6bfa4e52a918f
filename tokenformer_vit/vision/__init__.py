"""Use a vision model: predict, inspect, compress; find, read and unpack images."""
