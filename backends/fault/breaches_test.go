// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// breaches are rules against the contract, and the checks of the suite that must find them.
var breaches = []struct {
	name   string
	rules  []Rule
	checks []string
}{
	{"duplicate", []Rule{{On: Write, Every: 7, Do: BreakDuplicate()}},
		[]string{"Load", "Together"}},
	{"forget", []Rule{{On: Batch, Every: 3, Do: BreakForget()}},
		[]string{"Load", "Full", "Drop"}},
	{"early-write", []Rule{{On: Write, Do: BreakEarly(5 * ms)}},
		[]string{"Lengths", "Patterns"}},
	{"early-read", []Rule{{On: Read, Do: BreakEarly(5 * ms)}},
		[]string{"Lengths"}},
	{"corrupt", []Rule{{On: Write, Every: 5, Do: BreakCorrupt()}},
		[]string{"Lengths", "Load"}},
	{"corrupt-all", []Rule{{On: Write, Do: BreakCorrupt()}},
		[]string{"ManyDescriptors"}},
	{"corrupt-reads", []Rule{{On: Read, Do: BreakCorrupt()}},
		[]string{"Lengths", "Patterns"}},
	{"skip", []Rule{{On: Write, Do: BreakSkip()}},
		[]string{"Lengths", "ManyDescriptors"}},
	{"late-write", []Rule{{On: Write, Size: AtLeast(1 << 20), Chance: 0.5, Do: Swallow()},
		{On: Write, Do: BreakLateWrite(8 * ms)}},
		[]string{"Cancel", "PeerClose"}},
	{"late-read", []Rule{{On: Read, Chance: 0.5, Do: Swallow()},
		{On: Read, Do: BreakLateWrite(8 * ms)}},
		[]string{"Cancel"}},
	{"late-write-of-a-delayed", []Rule{{On: Write, Chance: 0.2, Do: Delay(100*us, 0)},
		{On: Write, Do: BreakLateWrite(3 * ms)}},
		[]string{"RevokeUnderWrites"}},
	{"overtake", []Rule{{On: Message, Do: BreakOvertake(2 * ms)}},
		[]string{"MessageBehindItsBytes"}},
	{"swap", []Rule{{On: Receive, Chance: 0.2, Do: BreakSwap(2 * ms)}},
		[]string{"MessageOrder", "MessageBackPressure"}},
	{"lose", []Rule{{On: Receive, Every: 5, Do: BreakLose()}},
		[]string{"MessageBackPressure"}},
	{"repeat", []Rule{{On: Receive, Every: 5, Do: BreakRepeat()}},
		[]string{"MessageOrder", "MessageBackPressure"}},
	{"skipped-revoke", []Rule{{On: Revoke, Do: BreakSkip()}},
		[]string{"Revoke", "RevokeUnderWrites"}},
}

// lateness is longer than any breach comes late.
const lateness = 100 * time.Millisecond

// breachTries is how often a check may look: where the process stands still, a byte that comes a
// little late may be there when the check looks. One finding proves that the check can fail.
const breachTries = 10

// TestBreachesAreFound proves that the suite notices each of them. Some are data races.
func TestBreachesAreFound(t *testing.T) {
	if raceEnabled {
		t.Log("not run with the race detector, which notices first")
		return
	}
	for _, c := range breaches {
		t.Run(c.name, func(t *testing.T) {
			h := wrapped("breach", func() (driver.Backend, error) { return openMem() }, c.rules...)
			h.Local, h.Remote = drivertest.ForeignMemory, drivertest.ForeignMemory
			for _, name := range c.checks {
				var failures []string
				for try := 0; len(failures) == 0 && try < breachTries; try++ {
					failures = drivertest.Failures(t, h, drivertest.Pair, name, time.Second,
						func() { time.Sleep(lateness) })
				}
				if len(failures) == 0 {
					t.Fatalf("%s did not notice", name)
				}
				t.Logf("%s: %.160s", name, failures[0])
			}
		})
	}
}
