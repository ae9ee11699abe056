def draw(rows, folder, name):
    pass
