package admin

import "io/fs"

// ownedByUs is not asked: there is no socket here.
func ownedByUs(fs.FileInfo) bool { return false }
