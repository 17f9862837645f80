// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"maps"
	"runtime"
	"slices"
	"strings"
)

// stacksMax bounds the text of all stacks: some ten thousand goroutines.
const stacksMax = 32 << 20

// goroutines lists all but the caller's by id.
func goroutines() map[string]string {
	list := map[string]string{}
	for i, stack := range strings.Split(allStacks(), "\n\n") {
		header, _, _ := strings.Cut(stack, " [")
		if i > 0 && header != "" { // the caller comes first
			list[header] = stack
		}
	}
	return list
}

func allStacks() string {
	for size := 64 << 10; ; size *= 4 {
		text := make([]byte, size)
		n := runtime.Stack(text, true)
		if n < size || size >= stacksMax {
			return string(text[:n])
		}
	}
}

// expected are functions of goroutines that the runtime and the testing package
// start when they like and keep.
var expected = []string{
	"created by runtime.",
	"created by testing.",
	"\ntesting.(*T).Run(",
	"\ntesting.(*M).startAlarm",
	"os/signal.signal_recv(",
	"runtime.ReadTrace(",
	"runtime/pprof.profileWriter(",
}

func grownGoroutines(before, after map[string]string) []string {
	var grown []string
	for _, id := range slices.Sorted(maps.Keys(after)) {
		stack := after[id]
		isExpected := slices.ContainsFunc(expected, func(part string) bool {
			return strings.Contains(stack, part)
		})
		if _, old := before[id]; !old && !isExpected {
			grown = append(grown, stack)
		}
	}
	return grown
}
