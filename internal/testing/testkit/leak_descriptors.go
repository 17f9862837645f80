// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
)

// warmUp makes the runtime open its own descriptors, which it does at the first
// use of the poller and never undoes.
func warmUp() {
	r, w, err := os.Pipe()
	if err == nil {
		_ = r.Close()
		_ = w.Close()
	}
}

// descriptors lists the open ones, without the one that the listing needs. A file whose name has
// gone since it was opened is the same file: a child may have it from a parent that has ended.
func descriptors() map[int]string {
	const dir = "/proc/self/fd"
	list := map[int]string{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return list
	}
	for _, entry := range entries {
		number, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if target, err := os.Readlink(dir + "/" + entry.Name()); err == nil {
			list[number] = strings.TrimSuffix(target, " (deleted)")
		}
	}
	return list
}

// class is a target without what tells two of the same kind apart, so that one
// that was closed and opened again counts as the same.
func class(target string) string {
	if kind, _, ok := strings.Cut(target, ":["); ok && kind != "anon_inode" {
		return kind // "socket" of socket:[4711], but all of anon_inode:[eventfd]
	}
	return target
}

func grownDescriptors(before, after map[int]string) []string {
	surplus := map[string]int{}
	for _, target := range after {
		surplus[class(target)]++
	}
	for _, target := range before {
		surplus[class(target)]--
	}
	var grown []string
	for _, number := range slices.Sorted(maps.Keys(after)) {
		target := after[number]
		if surplus[class(target)] > 0 && before[number] != target {
			surplus[class(target)]--
			grown = append(grown, fmt.Sprintf("descriptor %d: %s", number, target))
		}
	}
	return grown
}

func grownCounts(before, after map[string]uint64) []string {
	var grown []string
	for _, name := range slices.Sorted(maps.Keys(after)) {
		if after[name] > before[name] {
			grown = append(grown, fmt.Sprintf("%s: %d, %d at the start", name, after[name],
				before[name]))
		}
	}
	return grown
}
