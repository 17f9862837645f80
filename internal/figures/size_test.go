// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"strings"
	"testing"
)

func TestParseSize(t *testing.T) {
	good := map[string]uint64{
		"1": 1, "656": 656, "656B": 656, "64KiB": 64 << 10, "64K": 64 << 10, "1 MiB": 1 << 20,
		"1.5GiB": 3 << 29, "24GB": 24e9, "100kB": 100e3, "2T": 2 << 40, " 7B ": 7,
	}
	for text, want := range good {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for says, texts := range map[string][]string{
		"KiB":       {"", "KiB", "5 parsecs", "nan", "1KiBB", "MiB 3"},
		"too small": {"0", "-1", "0.1", "-3GiB", "-inf", "0TiB"},
		"too large": {"1e30", "inf", "99999999TiB", "8388608TiB"},
	} {
		for _, text := range texts {
			if got, err := ParseSize(text); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("ParseSize(%q) = %d, %v; want an error that says %q", text, got, err, says)
			}
		}
	}
}

func TestFormatSizeIsReadBack(t *testing.T) {
	for n, want := range map[uint64]string{1: "1B", 656: "656B", 1 << 10: "1KiB",
		3 << 19: "1536KiB", 1 << 30: "1GiB", 24e9: "23437500KiB"} {
		got := FormatSize(n)
		if got != want {
			t.Errorf("FormatSize(%d) = %q, want %q", n, got, want)
		}
		if back, err := ParseSize(got); err != nil || back != n {
			t.Errorf("ParseSize(FormatSize(%d)) = %d, %v", n, back, err)
		}
	}
	for n, want := range map[uint64]string{24e9: "22.4 GiB", 1<<40 - 1<<30: "1023 GiB",
		1<<40 - 1: "1024 GiB", 1 << 40: "1 TiB",
		999 << 20: "999 MiB", 5000 << 40: "5000 TiB", 7: "7 B", 1023: "1023 B"} {
		if got := RoundSize(n); got != want {
			t.Errorf("RoundSize(%d) = %q, want %q", n, got, want)
		}
	}
}
