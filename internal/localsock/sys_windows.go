package localsock

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// ownedByUs trusts the rights of the user's own temporary folder.
func ownedByUs(fs.FileInfo) bool { return true }

// nobodyThere: a socket that does not answer is a dead one here.
func nobodyThere(error) bool { return true }

const sharingViolation = syscall.Errno(32)

// lock opens the file for this process alone.
func lock(path string) (*os.File, error) {
	name, err := syscall.UTF16PtrFromString(path)
	if err != nil {
		return nil, err
	}
	h, err := syscall.CreateFile(name, syscall.GENERIC_READ|syscall.GENERIC_WRITE, 0, nil,
		syscall.OPEN_ALWAYS, syscall.FILE_ATTRIBUTE_NORMAL, 0)
	switch {
	case errors.Is(err, sharingViolation):
		return nil, ErrLocked
	case err != nil:
		return nil, err
	}
	return os.NewFile(uintptr(h), path), nil
}
