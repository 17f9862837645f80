// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"fmt"
	"strconv"
	"strings"
)

// Link is what a PCIe link does, or could do. The zero value is not known.
type Link struct {
	Gen   int `json:"gen"`   // generation of PCIe, which is its speed; 0: not known
	Width int `json:"width"` // lanes; 0: not known
}

// String is as "Gen5 x16".
func (l Link) String() string {
	switch {
	case l == Link{}:
		return "link not known"
	case l.Gen == 0:
		return fmt.Sprintf("x%d", l.Width)
	case l.Width == 0:
		return fmt.Sprintf("Gen%d", l.Gen)
	}
	return fmt.Sprintf("Gen%d x%d", l.Gen, l.Width)
}

// gigatransfers of a lane, by generation.
var gigatransfers = [...]float64{1: 2.5, 2: 5, 3: 8, 4: 16, 5: 32, 6: 64, 7: 128}

// Rate returns the bytes a second of one direction, after the line code and before the
// headers of packets; 0: not known.
func (l Link) Rate() float64 {
	if l.Gen < 1 || l.Gen >= len(gigatransfers) || l.Width < 1 {
		return 0
	}
	code := 128.0 / 130
	switch {
	case l.Gen <= 2:
		code = 8.0 / 10
	case l.Gen >= 6:
		code = 242.0 / 256 // flits carry their own checks
	}
	return gigatransfers[l.Gen] * 1e9 / 8 * code * float64(l.Width)
}

// Below reports whether l is known to do less than max could.
func (l Link) Below(max Link) bool { return l.slower(max) || l.Narrower(max) }

func (l Link) slower(max Link) bool { return l.Gen > 0 && l.Gen < max.Gen }

// Narrower reports whether l is known to have fewer lanes than max.
func (l Link) Narrower(max Link) bool { return l.Width > 0 && l.Width < max.Width }

// Min returns what is left when both ends must agree; what one of them does not say is the other's.
func (l Link) Min(other Link) Link {
	return Link{Gen: least(l.Gen, other.Gen), Width: least(l.Width, other.Width)}
}

func least(a, b int) int {
	if a == 0 || b == 0 {
		return a + b
	}
	return min(a, b)
}

// Links reads the link of a PCI device: as it is, and as the device could have it.
func (s Sysfs) Links(address string) (now, most Link) {
	return s.link(address, "current"), s.link(address, "max")
}

func (s Sysfs) link(address, which string) Link {
	return Link{
		Gen:   generation(s.Text(devices, address, which+"_link_speed")),
		Width: lanes(s.Text(devices, address, which+"_link_width")),
	}
}

// generation reads "32.0 GT/s PCIe"; virtual machines say "Unknown".
func generation(text string) int {
	number, unit, _ := strings.Cut(text, " ")
	speed, err := strconv.ParseFloat(number, 64)
	if err != nil || !strings.HasPrefix(unit, "GT/s") {
		return 0
	}
	for gen, known := range gigatransfers {
		if gen > 0 && speed == known {
			return gen
		}
	}
	return 0
}

// lanesMax is what PCIe has; a register without meaning reads as 63, or 255.
const lanesMax = 32

func lanes(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > lanesMax {
		return 0
	}
	return n
}
