"""Plans: the code of collectives for the stream interpreter, on whatever machine it runs."""
