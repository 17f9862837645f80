// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// readText returns a small file, or "" where it cannot be read: what a kernel
// lacks is not known.
func readText(path ...string) string {
	text, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		return ""
	}
	return string(text)
}

func readUint(path ...string) uint64 { return parseUint(strings.TrimSpace(readText(path...))) }

func parseUint(text string) uint64 {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// field returns the first number after a name, wherever that stands in a line.
func field(text, name string) uint64 {
	_, rest, ok := strings.Cut(text, name)
	if !ok {
		return 0
	}
	words := strings.Fields(rest)
	if len(words) == 0 {
		return 0
	}
	return parseUint(words[0])
}

func kibibytes(text, name string) uint64 { return field(text, name) << 10 }

// chosen returns the word in brackets.
func chosen(text string) string {
	_, rest, _ := strings.Cut(text, "[")
	word, _, ok := strings.Cut(rest, "]")
	if !ok {
		return ""
	}
	return word
}

// parseList reads "0-2,5" as 0 1 2 5. Nonsense ends it, and so does a list that
// is longer than the kernel can have nodes.
func parseList(text string) []int {
	var list []int
	for part := range strings.SplitSeq(strings.TrimSpace(text), ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, err1 := strconv.Atoi(first)
		to, err2 := strconv.Atoi(last)
		if err1 != nil || err2 != nil || from < 0 || to >= nodesMax {
			break
		}
		for n := from; n <= to; n++ {
			list = append(list, n)
		}
	}
	return list
}
