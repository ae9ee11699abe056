"""What the pictures of all reports share: pages and fonts, heat maps, planes and labels."""
