// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"math"
	"strconv"
	"strings"
	"time"
)

// unit is what follows a number.
type unit struct {
	name string
	size uint64
}

// From large to small: what is printed takes the first that divides it. Sizes are
// binary and rates decimal, as the field has them.
var (
	sizeUnits = []unit{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}
	rateUnits = []unit{{"TB/s", 1e12}, {"GB/s", 1e9}, {"MB/s", 1e6}, {"kB/s", 1e3}, {"B/s", 1}}
)

func formatUnits(n uint64, units []unit) string {
	for _, u := range units {
		if n%u.size == 0 && n != 0 {
			return strconv.FormatUint(n/u.size, 10) + u.name
		}
	}
	return strconv.FormatUint(n, 10)
}

// parseSize reads 4096, 64KiB and the like.
func parseSize(text string) (uint64, bool) {
	factor := uint64(1)
	for _, u := range sizeUnits {
		if number, ok := strings.CutSuffix(text, u.name); ok {
			text, factor = number, u.size
			break
		}
	}
	n, ok := parseCount(text)
	return n * factor, ok && n <= math.MaxUint64/factor
}

// parseRate reads 50GB/s, 12.5GB/s and the like: a whole number of bytes, at least one.
func parseRate(text string) (uint64, bool) {
	for _, u := range rateUnits {
		number, ok := strings.CutSuffix(text, u.name)
		if !ok {
			continue
		}
		if !plainNumber(number) {
			return 0, false
		}
		f, err := strconv.ParseFloat(number, 64)
		f = math.Round(f * float64(u.size))
		return uint64(f), err == nil && f >= 1 && f <= 1e15 // above it a float64 may round
	}
	return 0, false
}

// parseCount reads a number without sign, unit or a leading zero.
func parseCount(text string) (uint64, bool) {
	if !plainNumber(text) || len(text) > 1 && text[0] == '0' {
		return 0, false
	}
	n, err := strconv.ParseUint(text, 10, 64)
	return n, err == nil
}

// plainNumber is digits, with a point among them at most.
func plainNumber(text string) bool {
	return text != "" && text[0] != '.' && strings.Trim(text, "0123456789.") == "" &&
		strings.Count(text, ".") <= 1
}

// parseTime reads 5ms and the like.
func parseTime(text string) (time.Duration, bool) {
	if text == "" || strings.ContainsAny(text[:1], "+-") {
		return 0, false
	}
	d, err := time.ParseDuration(text)
	return d, err == nil && d <= TimeMax
}
