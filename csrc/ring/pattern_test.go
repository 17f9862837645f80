// SPDX-License-Identifier: Apache-2.0

package ring

import (
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// TestPagesOf refuses patterns that C must not see.
func TestPagesOf(t *testing.T) {
	loops := func(n ...uint32) (list []driver.Loop) {
		for _, n := range n {
			list = append(list, driver.Loop{N: n})
		}
		return list
	}
	slots := func(n int) driver.Side { return driver.Side{List: make([]uint32, n)} }
	for name, x := range map[string]struct {
		p  driver.Pattern
		ok bool
	}{
		"as many entries as runs may be": {driver.Pattern{Count: RunsMax}, true},
		"one entry more":                 {driver.Pattern{Count: RunsMax + 1}, false},
		"as many runs": {driver.Pattern{Count: 2, Loops: loops(RunsMax / 2)},
			true},
		"more runs": {driver.Pattern{Count: 2, Loops: loops(RunsMax/2 + 1)},
			false},
		"runs that overflow": {driver.Pattern{Count: 1, Loops: loops(1<<31, 1<<31, 4)}, false},
		"too many loops":     {driver.Pattern{Count: 1, Loops: loops(1, 1, 1, 1)}, false},
		"no entries":         {driver.Pattern{}, false},
		"a list of slots":    {driver.Pattern{Count: 3, Local: slots(3)}, true},
		"a short list":       {driver.Pattern{Count: 3, Remote: slots(2)}, false},
		"a skip without slots of several": {driver.Pattern{Count: 1,
			Local: driver.Side{First: 1}}, false},
		"shared slots": {driver.Pattern{Count: 3, Local: driver.Side{First: 1, Per: 2,
			List: make([]uint32, 2)}}, true},
	} {
		if _, ok := PagesOf(&x.p); ok != x.ok {
			t.Errorf("%s: %v", name, ok)
		}
	}
}
