// SPDX-License-Identifier: Apache-2.0

// Package topology reads from the kernel where the devices of a machine lie: on which PCI
// switch, below which root port, near which NUMA node, by which link. It opens no device
// and needs no privilege. What the kernel does not tell is left unknown, never guessed.
package topology

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Sysfs is where the kernel tells of devices: "/sys", or a folder of the same form. Its
// methods may be called by any goroutine.
type Sysfs string

func (s Sysfs) at(path []string) string {
	return filepath.Join(append([]string{string(s)}, path...)...)
}

// Text reads a file of one line without its white space; empty: there is none.
func (s Sysfs) Text(path ...string) string {
	b, err := os.ReadFile(s.at(path))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// There reports whether there is such a file or folder.
func (s Sysfs) There(path ...string) bool {
	_, err := os.Stat(s.at(path))
	return err == nil
}

// List names what is in a folder, in order, numbers as numbers: eth2 before eth10.
func (s Sysfs) List(path ...string) (names []string) {
	entries, _ := os.ReadDir(s.at(path)) // none is an answer
	for _, e := range entries {
		names = append(names, e.Name())
	}
	slices.SortFunc(names, func(a, b string) int {
		if len(a) != len(b) {
			return len(a) - len(b)
		}
		return strings.Compare(a, b)
	})
	return names
}

// Node returns the NUMA node of a device folder or of a link to one; -1: not known, or the
// same for all.
func (s Sysfs) Node(device ...string) int {
	node, err := strconv.Atoi(s.Text(append(slices.Clone(device), "numa_node")...))
	if err != nil || node < 0 {
		return -1
	}
	return node
}

// Path returns the PCI addresses on the way to a device folder, or to what a link leads to.
// Empty: it is on no PCI bus.
func (s Sysfs) Path(device ...string) (p Path) {
	real, err := filepath.EvalSymlinks(s.at(device))
	if err != nil {
		return nil
	}
	for part := range strings.SplitSeq(filepath.ToSlash(real), "/") {
		if IsRoot(part) || IsAddress(part) {
			p = append(p, part)
		}
	}
	return p
}
