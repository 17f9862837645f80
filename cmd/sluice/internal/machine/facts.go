// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"runtime"
	"strconv"
	"strings"
)

func (s *Source) machine() Machine {
	return Machine{
		Kernel:      s.text("proc/sys/kernel/osrelease"),
		Arch:        runtime.GOARCH,
		CPU:         s.field("proc/cpuinfo", "model name"),
		CPUs:        countList(s.field("proc/self/status", "Cpus_allowed_list")),
		Nodes:       max(len(s.memory.Nodes), 1),
		MemoryTotal: s.memory.Total,
		MemoryFree:  s.memory.Available,
	}
}

// countList counts the members of a kernel list such as "0-3,8,10-11".
func countList(list string) int {
	n := 0
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		a, err := strconv.Atoi(first)
		if err != nil {
			continue
		}
		b := a
		if isRange {
			if b, err = strconv.Atoi(last); err != nil {
				continue
			}
		}
		n += max(b-a+1, 0)
	}
	return n
}
