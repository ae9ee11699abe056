"""What is written of a study: csv files, pictures, one page, and a table for the terminal."""
