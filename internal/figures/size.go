// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// units in the order in which they are tried: the longer suffix first.
var units = []struct {
	suffix string
	bytes  uint64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12},
	{"K", 1 << 10}, {"M", 1 << 20}, {"G", 1 << 30}, {"T", 1 << 40},
	{"B", 1}, {"", 1},
}

// UnitsHelp says what ParseSize takes, for usage messages.
const UnitsHelp = "a number with B, KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB " +
	"(powers of 1000)"

// ParseSize reads "656", "64KiB", "1.5 GiB" or "24GB" as bytes. The result is at
// least 1.
func ParseSize(text string) (uint64, error) {
	text = strings.TrimSpace(text)
	for _, u := range units {
		number, ok := strings.CutSuffix(text, u.suffix)
		if !ok {
			continue
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		v = math.Round(v * float64(u.bytes))
		switch {
		case err != nil || math.IsNaN(v):
			return 0, fmt.Errorf("size %q is not %s", text, UnitsHelp)
		case v < 1:
			return 0, fmt.Errorf("size %q is too small: want at least 1B", text)
		case v >= 1<<63:
			return 0, fmt.Errorf("size %q is too large: want less than %dTiB", text, 1<<23)
		}
		return uint64(v), nil
	}
	return 0, fmt.Errorf("size %q is not %s", text, UnitsHelp)
}

// FormatSize writes bytes in the largest power of 1024 that divides them, so
// that ParseSize reads the same number again.
func FormatSize(n uint64) string {
	for _, u := range []int{3, 2, 1, 0} {
		if b := units[u].bytes; n >= b && n%b == 0 {
			return strconv.FormatUint(n/b, 10) + units[u].suffix
		}
	}
	return strconv.FormatUint(n, 10) + "B"
}

// RoundSize writes bytes for people: three digits and a unit.
func RoundSize(n uint64) string {
	for _, u := range []int{3, 2, 1, 0} {
		if b := units[u].bytes; n >= b {
			v := float64(n) / float64(b)
			if v >= 999.5 { // up to 1024 of the smaller unit
				return fmt.Sprintf("%.0f %s", v, units[u].suffix)
			}
			return fmt.Sprintf("%.3g %s", v, units[u].suffix)
		}
	}
	return strconv.FormatUint(n, 10) + " B"
}
