// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"testing"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// harmless are rules that a program cannot tell from a backend that is slow.
var harmless = []Rule{
	{On: Batch, Chance: 0.3, Do: Delay(300*us, 300*us)},
	{On: Write, Chance: 0.2, Do: Late(200*us, 200*us)},
	{On: Read, Chance: 0.2, Do: Delay(250*us, 250*us)},
}

func openMem() (driver.Backend, error) { return mem.New(mem.Config{BatchesMax: 256}) }

// wrapped is the harness of mem under rules. What Late has begin later is not refused at once, and
// each batch is kept account of.
func wrapped(name string, rules ...Rule) drivertest.Harness {
	return drivertest.Harness{Name: name, New: func() (driver.Backend, error) {
		b, err := openMem()
		if err != nil {
			return nil, err
		}
		return Wrap(b, 3, rules...)
	}, Guards: true, Without: []string{"Bounds", "Keys", "NoAllocation"}}
}

var (
	slowMem = wrapped("slow-mem", harmless...)
	fullMem = wrapped("full-mem", Rule{On: Batch, Every: 7, Do: Stall(300 * us)},
		Rule{On: Batch, Chance: 0.3, Do: Delay(200*us, 200*us)})
)

func TestMain(m *testing.M) { drivertest.Main(m, slowMem, fullMem) }

func TestHarmlessRules(t *testing.T) {
	h := slowMem
	h.Wirings = drivertest.Pair
	drivertest.Run(t, h)
}

func TestSoakHarmlessRules(t *testing.T) { drivertest.Run(t, slowMem) }

// TestStalls leaves out the checks that count on room where nothing is in flight.
func TestStalls(t *testing.T) {
	h := fullMem
	h.Wirings = drivertest.Pair
	h.Only = []string{"Load", "MessageBackPressure", "CancelNothing", "WakeCompletion", "PingPong",
		"Together"}
	drivertest.Run(t, h)
}
