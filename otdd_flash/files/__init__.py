"""Files that appear whole or not at all, and are found damaged before they are used."""
