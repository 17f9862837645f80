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
	rules  string
	checks []string
}{
	{"write every=7: !duplicate", []string{"Load", "Hammer"}},
	{"batch every=3: !forget", []string{"Load", "Full", "PeerClose"}},
	{"write: !early 5ms", []string{"Lengths", "Pattern"}},
	{"read: !early 5ms", []string{"Lengths"}},
	{"write every=5: !corrupt", []string{"Lengths", "Load"}},
	{"write: !corrupt", []string{"DescsMax", "Neighbours"}},
	{"read: !corrupt", []string{"Lengths", "Pattern"}},
	{"write: !skip", []string{"Lengths", "Neighbours"}},
	{"write size>=1MiB p=0.5: swallow; write: !latewrite 8ms",
		[]string{"CancelWrite", "PeerClose"}},
	{"read p=0.5: swallow; read: !latewrite 8ms", []string{"CancelRead"}},
	{"write p=0.2: delay 100µs; write: !latewrite 3ms", []string{"SilenceUnderWrites"}},
	{"message: !overtake 2ms", []string{"NotifyAfterData"}},
	{"receive p=0.2: !swap 2ms", []string{"NotifyOrder", "NotifyBackPressure"}},
	{"receive every=5: !lose", []string{"NotifyBackPressure"}},
	{"receive every=5: !repeat", []string{"NotifyOrder", "NotifyBackPressure"}},
	{"fence: !skip", []string{"FenceRevokes", "SilenceUnderWrites"}},
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
		t.Run(c.rules, func(t *testing.T) {
			h := wrapped("breach", func() (driver.Backend, error) { return openMem() }, c.rules)
			h.Limit = 300 * time.Millisecond
			h.Local, h.Remote = drivertest.ForeignMemory, drivertest.ForeignMemory
			h.Settle = func() { time.Sleep(lateness) }
			for _, name := range c.checks {
				var failures []string
				for try := 0; len(failures) == 0 && try < breachTries; try++ {
					failures = drivertest.Failures(t, h, drivertest.Pair, name)
				}
				if len(failures) == 0 {
					t.Fatalf("%s did not notice", name)
				}
				t.Logf("%s: %.160s", name, failures[0])
			}
		})
	}
}
