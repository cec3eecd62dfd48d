//go:build !unix

package localsock

import "io/fs"

// ownedByUs trusts the rights of the user's own temporary folder.
func ownedByUs(fs.FileInfo) bool { return true }
