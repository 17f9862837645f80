// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"strings"
)

// Path is the way from a root complex ("pci0000:3a") over its root port and the ports of
// switches ("0000:3a:00.0") to a device, whose address is the last.
type Path []string

// Address returns the PCI address of the device, or "" if the path is empty.
func (p Path) Address() string {
	if len(p) == 0 {
		return ""
	}
	return p[len(p)-1]
}

// Parent returns the PCI address of the port at the other end of the device's link. It returns ""
// if that is not known, or the device is attached to the root complex itself.
func (p Path) Parent() string {
	if len(p) < 2 || !IsAddress(p[len(p)-2]) {
		return ""
	}
	return p[len(p)-2]
}

// common returns the length of the longest prefix that two paths share.
func (p Path) common(q Path) int {
	n := 0
	for n < len(p) && n < len(q) && p[n] == q[n] {
		n++
	}
	return n
}

// IsRoot reports whether a name is that of a root complex, as pci0000:3a.
func IsRoot(name string) bool {
	rest, ok := strings.CutPrefix(name, "pci")
	return ok && IsAddress(rest+":00.0")
}

// IsAddress reports whether a name is a PCI address as the kernel spells it, such as 0000:3b:00.0.
// The domain may have five digits and more, for drives behind a controller that hides them.
func IsAddress(name string) bool {
	domain, rest, ok := strings.Cut(name, ":")
	return ok && len(domain) >= 4 && len(domain) <= 8 && len(rest) == 7 && rest[2] == ':' &&
		rest[5] == '.' &&
		hex(domain) && hex(rest[:2]) && hex(rest[3:5]) && rest[6] >= '0' && rest[6] <= '7'
}

func hex(s string) bool { return strings.Trim(s, "0123456789abcdef") == "" }
