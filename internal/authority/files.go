// SPDX-License-Identifier: Apache-2.0

package authority

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// The files of an authority in its directory. Those of a member have its name.
const (
	CertFile = "ca.pem"
	KeyFile  = "ca-key.pem"
)

// Paths are where a member's files lie.
func Paths(dir, name string) (cert, key string) {
	return filepath.Join(dir, name+".pem"), filepath.Join(dir, name+"-key.pem")
}

// CheckName refuses names of members that are no names of files, or those of the authority.
func CheckName(name string) error {
	cert, key := Paths("", name)
	switch {
	case name == "" || name != filepath.Base(name) || strings.HasPrefix(name, ".") ||
		strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' || r == '\\' }):
		return fmt.Errorf("%q is no name for files: use ASCII letters, digits, dots and dashes: "+
			"%w", name, driver.ErrBounds)
	case cert == CertFile || cert == KeyFile || key == KeyFile || cert == RevokedFile:
		return fmt.Errorf(
			"%q would take the place of the authority's own files: choose another: %w", name,
			driver.ErrBusy)
	}
	return nil
}

// Store writes certificate and key, the key for its owner alone. Files that are there stay,
// and it fails, unless force is said. Each file is whole or not there; the key comes first, so
// that a reader of the files never sees the new certificate alone for long.
func Store(p Pair, cert, key string, force bool) error {
	for _, path := range []string{cert, key} {
		if _, err := os.Lstat(path); err == nil && !force {
			return fmt.Errorf("%s is there already: choose another name or directory, or say "+
				"--force: %w", path, os.ErrExist)
		} else if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := place(key, p.Key, 0o600); err != nil {
		return err
	}
	return place(cert, p.Cert, 0o644)
}

// place writes a file beside and moves it there.
func place(path string, text []byte, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".sluice-*") // with mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // gone by then if all is well
	_, err = f.Write(text)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err == nil {
		err = syncEntry(f) // or a loss of power brings back the file before: what was revoked
	}
	return errors.Join(err, f.Close())
}

// syncEntry is ownfiles.SyncEntry; a test sees it called.
var syncEntry = ownfiles.SyncEntry

// Load reads the authority of a directory.
func Load(dir string) (*Authority, error) {
	cert, err := os.ReadFile(filepath.Join(dir, CertFile))
	if err != nil {
		return nil, err
	}
	key, err := os.ReadFile(filepath.Join(dir, KeyFile))
	if err != nil {
		return nil, err
	}
	return Parse(Pair{cert, key})
}
