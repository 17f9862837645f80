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
const harmless = `seed 3
batch p=0.3: delay 300µs±200µs
write p=0.2: late 200µs±200µs
read p=0.2: reorder 500µs
batch: limit 20GB/s burst=1MiB
batch: model 2µs 1ns 50GB/s
receive p=0.3: delay 300µs±300µs
connect p=0.3: delay 100µs
fence p=0.1: delay 50µs
`

func openMem() (driver.Backend, error) { return mem.New(mem.Config{BatchesMax: 256}) }
func openShm() (driver.Backend, error) { return shm.New(shm.Config{Workers: 2}) }

// wrapped is the harness of a backend under rules.
func wrapped(name string, open func() (driver.Backend, error), text string) drivertest.Harness {
	return drivertest.Harness{Name: name, New: func() (driver.Backend, error) {
		rules, err := Parse(text)
		if err != nil {
			return nil, err
		}
		b, err := open()
		if err != nil {
			return nil, err
		}
		return Wrap(b, rules)
	}, Guards: strings.HasSuffix(name, "-mem")}
}

var (
	plainMem = wrapped("plain-mem", openMem, "")
	slowMem  = wrapped("slow-mem", openMem, harmless)
	slowShm  = wrapped("slow-shm", openShm, harmless)
	fullMem  = wrapped("full-mem", openMem, "batch every=7: stall 300µs; batch p=0.3: delay "+
		"200µs±200µs")
)

func TestMain(m *testing.M) { drivertest.Main(m, plainMem, slowMem, slowShm, fullMem) }

func TestWithoutRules(t *testing.T) {
	h := plainMem
	h.Wirings = drivertest.Pair
	drivertest.Run(t, h)
}

// TestHarmlessRules is between two backends. With itself a backend has the checks that want that.
func TestHarmlessRules(t *testing.T) {
	h := slowMem
	h.Wirings = drivertest.Pair
	drivertest.Run(t, h)
	h.Wirings, h.Only = drivertest.Self, drivertest.Alone
	drivertest.Run(t, h)
}

// TestHarmlessRulesOverShm is between two processes: within one it is the same code.
func TestHarmlessRulesOverShm(t *testing.T) {
	overShm(t, append(drivertest.Apart[:len(drivertest.Apart):len(drivertest.Apart)], "ArmLost",
		"ConnectFrozen", "FenceFrozenBeside", "PeerSilent", "AllocatorFrozen", "AllocatorMoves",
		"AllocatorReuse", "AllocatorSlices")...)
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
	h.Only = []string{"Load", "NotifyOrder", "NotifyBackPressure", "CancelWrite", "ArmCompletion",
		"ArmFull", "ArmPingPong", "PeerClose", "Hammer"}
	drivertest.Run(t, h)
}

func BenchmarkWithoutRules(b *testing.B) { drivertest.Benchmark(b, plainMem) }
