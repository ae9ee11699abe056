"""What the pictures of all reports share.

`page` holds the page, style and fonts, and the writing of files; `heat_maps` matrices between
classes or datasets; `planes` projected points and the names beside points. The modules of `report`
call them.
"""
