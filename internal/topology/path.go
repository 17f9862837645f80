// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"strings"
)

// Path is the way from a root complex ("pci0000:3a") over its root port and the ports of
// switches ("0000:3a:00.0") to a device, whose address is the last.
type Path []string

// Address returns the PCI address at the end; empty: on no bus.
func (p Path) Address() string {
	if len(p) == 0 {
		return ""
	}
	return p[len(p)-1]
}

// Parent returns the port that the device is plugged into, the other end of its link;
// empty: the root complex itself, or not known.
func (p Path) Parent() string {
	if len(p) < 2 || !IsAddress(p[len(p)-2]) {
		return ""
	}
	return p[len(p)-2]
}

// common counts the elements that two paths begin with alike.
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

// IsAddress reports whether a name is a PCI address as the kernel spells it, 0000:3b:00.0.
// Controllers that hide drives behind themselves make domains of five digits.
func IsAddress(name string) bool {
	domain, rest, ok := strings.Cut(name, ":")
	return ok && len(domain) >= 4 && len(domain) <= 8 && len(rest) == 7 && rest[2] == ':' &&
		rest[5] == '.' &&
		hex(domain) && hex(rest[:2]) && hex(rest[3:5]) && rest[6] >= '0' && rest[6] <= '7'
}

func hex(s string) bool { return strings.Trim(s, "0123456789abcdef") == "" }
