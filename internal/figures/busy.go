// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Processors are the seconds that those of the machine have passed with something since it began,
// and this process with its children that have ended.
type Processors struct{ all, used, stolen, own float64 }

// ticks is how many of /proc/stat are a second, on every machine (USER_HZ).
const ticks = 100

// ReadProcessors looks at them now. What the kernel does not tell is 0.
func ReadProcessors() (p Processors) {
	text, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(text), "\n")
	for i, word := range strings.Fields(line) {
		n, err := strconv.ParseFloat(word, 64)
		if err != nil || i > 8 { // the name; guests, which are in user already
			continue
		}
		n /= ticks
		p.all += n
		switch i {
		case 1, 2, 3: // user, nice, system
			p.used += n
		case 8:
			p.stolen += n
		}
	}
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		if unix.Getrusage(who, &u) == nil {
			p.own += time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
		}
	}
	return p
}

// What is worth a note: a share of the machine's processors that others used, or that the host took
// away, and the least that clock ticks tell.
const (
	othersMost = 0.1
	stolenMost = 0.02
	leastTime  = 0.2 // s
)

// Busy says what else the machine did since an earlier look, "" where that was little.
func (p Processors) Busy(since Processors) string {
	all, stolen := p.all-since.all, p.stolen-since.stolen
	others := p.used - since.used - (p.own - since.own)
	var found []string
	if others > max(othersMost*all, leastTime) {
		found = append(found, fmt.Sprintf("others took %.0f %% of its processors", 100*others/all))
	}
	if stolen > max(stolenMost*all, leastTime) {
		found = append(found, fmt.Sprintf("the host gave it %.0f %% less (steal)", 100*stolen/all))
	}
	if len(found) == 0 {
		return ""
	}
	return "the machine was busy: " + strings.Join(found, ", ") + ": measure again when it is idle"
}
