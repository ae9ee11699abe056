"""What the pictures of all reports share.

`page` holds figures, fonts and the writing of files, `heat_maps` matrices, `class_pictures` the
matrices between classes, `planes` projected points, and `point_names` the names beside them. The
modules of `report` call them.
"""
