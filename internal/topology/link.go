// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"fmt"
	"strconv"
	"strings"
)

// Link is the speed of a PCIe link: the present one, or the highest that a device can have.
type Link struct {
	Gen   int `json:"gen"`   // generation of PCIe, which determines the rate of a lane; 0: unknown
	Width int `json:"width"` // number of lanes; 0: unknown
}

// String returns for example "Gen5 x16".
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

// gigatransfers has the rate of a lane in GT/s, by generation.
var gigatransfers = [...]float64{1: 2.5, 2: 5, 3: 8, 4: 16, 5: 32, 6: 64, 7: 128}

// Rate returns the bytes per second in one direction, or 0 if that is unknown. The overhead of the
// line code is subtracted, that of packet headers is not.
func (l Link) Rate() float64 {
	if l.Gen < 1 || l.Gen >= len(gigatransfers) || l.Width < 1 {
		return 0
	}
	code := 128.0 / 130
	switch {
	case l.Gen <= 2:
		code = 8.0 / 10
	case l.Gen >= 6:
		code = 242.0 / 256 // a flit of 256 bytes has 14 of CRC and FEC
	}
	return gigatransfers[l.Gen] * 1e9 / 8 * code * float64(l.Width)
}

// Below reports whether l is known to be slower than max, by its generation or its width.
func (l Link) Below(max Link) bool { return l.slower(max) || l.Narrower(max) }

func (l Link) slower(max Link) bool { return l.Gen > 0 && l.Gen < max.Gen }

// Narrower reports whether l is known to have fewer lanes than max.
func (l Link) Narrower(max Link) bool { return l.Width > 0 && l.Width < max.Width }

// Min returns the lower generation and the lower width of two links. If one is unknown, Min returns
// the other.
func (l Link) Min(other Link) Link {
	return Link{Gen: least(l.Gen, other.Gen), Width: least(l.Width, other.Width)}
}

func least(a, b int) int {
	if a == 0 || b == 0 {
		return a + b
	}
	return min(a, b)
}

// Links returns the link of a PCI device: the present one, and the fastest that the device
// supports.
func (s Sysfs) Links(address string) (now, highest Link) {
	return s.link(address, "current"), s.link(address, "max")
}

func (s Sysfs) link(address, which string) Link {
	return Link{
		Gen:   generation(s.Text(devices, address, which+"_link_speed")),
		Width: lanes(s.Text(devices, address, which+"_link_width")),
	}
}

// generation returns the generation of a text such as "32.0 GT/s PCIe", or 0: virtual machines have
// "Unknown".
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

// lanesMax is the highest width of PCIe. The kernel prints 63 or 255 if the register has no valid
// value.
const lanesMax = 32

func lanes(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > lanesMax {
		return 0
	}
	return n
}
