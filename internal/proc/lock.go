// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// LockedBy is a process that has locked a file, by its number here; 0: /proc shows none.
func LockedBy(path string) int {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return 0
	}
	locks, _ := os.ReadFile("/proc/locks")
	file := fmt.Sprintf(" %02x:%02x:%d ", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for line := range strings.Lines(string(locks)) {
		before, _, found := strings.Cut(line, file)
		words := strings.Fields(before) // number, kind, and at last the process
		if !found || words[1] == "->" { // one that waits
			continue
		}
		if pid, err := strconv.Atoi(words[len(words)-1]); err == nil && pid > 0 {
			return pid
		}
	}
	return 0
}
