// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// extensions are those of the files that the rules check.
var extensions = []string{".go", ".c", ".h", ".cu", ".sh", ".py", ".md"}

// skipped are folders of built things and of fixtures.
var skipped = []string{"testdata", "build", "bin", "vendor", "third_party"}

// Read returns the files under a module's root. A Go file that does not parse is
// a finding of its own.
func Read(root string) (files []*File, broken []Finding, err error) {
	err = filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		base := entry.Name()
		if entry.IsDir() {
			hidden := strings.HasPrefix(base, ".") && base != ".ci" || strings.HasPrefix(base, "_")
			if name != root && (hidden || slices.Contains(skipped, base)) {
				return fs.SkipDir
			}
			return nil
		}
		if !slices.Contains(extensions, filepath.Ext(base)) && base != "Makefile" {
			return nil
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		short, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		short = filepath.ToSlash(short)
		f, err := NewFile(short, string(text))
		if err != nil {
			broken = append(broken, Finding{Path: short, Message: "does not parse: " + err.Error()})
			return nil
		}
		files = append(files, f)
		return nil
	})
	return files, broken, err
}
