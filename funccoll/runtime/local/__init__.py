"""Virtual devices: collectives between the devices that one process plays."""
