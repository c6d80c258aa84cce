"""The model spread over ranks: parameters are DTensors, and what moves between ranks is written out by hand."""
