// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"strings"
	"testing"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// harmless are rules that a program cannot tell from a backend that is slow.
var harmless = []Rule{
	{On: Batch, Chance: 0.3, Do: Delay(300*us, 200*us)},
	{On: Write, Chance: 0.2, Do: Late(200*us, 200*us)},
	{On: Read, Chance: 0.2, Do: Reorder(500 * us)},
	{On: Batch, Do: Limit(20e9, 1<<20)},
	{On: Batch, Do: Model(2*us, 1, 50e9)},
	{On: Receive, Chance: 0.3, Do: Delay(300*us, 300*us)},
	{On: Connect, Chance: 0.3, Do: Delay(100*us, 0)},
	{On: Revoke, Chance: 0.1, Do: Delay(50*us, 0)},
}

func openMem() (driver.Backend, error) { return mem.New(mem.Config{BatchesMax: 256}) }
func openShm() (driver.Backend, error) { return shm.New(shm.Config{Workers: 2}) }

// wrapped is the harness of a backend under rules.
func wrapped(name string, open func() (driver.Backend, error), rules ...Rule) drivertest.Harness {
	return drivertest.Harness{Name: name, New: func() (driver.Backend, error) {
		b, err := open()
		if err != nil {
			return nil, err
		}
		return Wrap(b, 3, rules...)
	}, Guards: strings.HasSuffix(name, "-mem")}
}

var (
	plainMem = wrapped("plain-mem", openMem)
	slowMem  = wrapped("slow-mem", openMem, harmless...)
	slowShm  = wrapped("slow-shm", openShm, harmless...)
	fullMem  = wrapped("full-mem", openMem, Rule{On: Batch, Every: 7, Do: Stall(300 * us)},
		Rule{On: Batch, Chance: 0.3, Do: Delay(200*us, 200*us)})
)

func TestMain(m *testing.M) { drivertest.Main(m, plainMem, slowMem, slowShm, fullMem) }

func TestWithoutRules(t *testing.T) {
	h := plainMem
	h.Wirings = drivertest.Pair
	drivertest.Run(t, h)
}

func TestHarmlessRules(t *testing.T) {
	h := slowMem
	h.Wirings = drivertest.Pair
	drivertest.Run(t, h)
}

// TestHarmlessRulesOverShm is between two processes: within one it is the same code.
func TestHarmlessRulesOverShm(t *testing.T) {
	overShm(t, append([]string{"RevokeKilled", "PeerSilent", "BackendClose"},
		drivertest.Streaming...)...)
}

func TestSoakHarmlessRules(t *testing.T)        { drivertest.Run(t, slowMem) }
func TestSoakHarmlessRulesOverShm(t *testing.T) { overShm(t) }

func overShm(t *testing.T, only ...string) {
	h := slowShm
	h.Wirings, h.Only = drivertest.Processes, only
	drivertest.Run(t, h)
}

// TestStalls leaves out the checks that count on room where nothing is in flight.
func TestStalls(t *testing.T) {
	h := fullMem
	h.Wirings = drivertest.Pair
	h.Only = []string{"Load", "MessageOrder", "MessageBackPressure", "CancelNothing",
		"WakeCompletion", "PingPong", "Together"}
	drivertest.Run(t, h)
}
