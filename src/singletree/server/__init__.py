"""The server: the only area besides ``cli`` that imports all the others."""
