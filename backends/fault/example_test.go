// SPDX-License-Identifier: Apache-2.0

package fault_test

import (
	"context"
	"fmt"
	"log"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// A program that writes ten times meets the two faults that the rules have for it.
func Example() {
	rules, err := fault.Parse(`
		seed 7
		write size>=4KiB every=5: fail lost    # the fifth write, and the tenth
		batch:                    delay 100µs±50µs
		batch peer=2:             limit 12.5GB/s burst=1MiB
	`)
	if err != nil {
		log.Fatal(err) // it says where, and what could stand there
	}
	inner, err := mem.New(mem.Config{})
	if err != nil {
		log.Fatal(err)
	}
	b, err := fault.Wrap(inner, rules)
	if err != nil {
		log.Fatal(err)
	}
	e, err := engine.Open(engine.Config{Name: "example", Backends: []driver.Backend{b}})
	if err != nil {
		log.Fatal(err)
	}
	defer e.Close()
	fmt.Println(writes(e, 10), "writes failed")
	fmt.Print(rules.List[0], " fired: ", b.Hits()[0].Fired)

	// Output:
	// 2 writes failed
	// write size>=4KiB every=5: fail lost fired: 2
}

// writes moves 4 KiB within the engine's own region, n times.
func writes(e *engine.Engine, n int) (failed int) {
	buffer, err := e.Alloc(8<<10, engine.AllocOptions{Purpose: "example"})
	if err != nil {
		log.Fatal(err)
	}
	defer buffer.Close()
	region, err := e.Register("kv", buffer.Segment())
	if err != nil {
		log.Fatal(err)
	}
	defer region.Close()
	self, err := e.Self()
	if err != nil {
		log.Fatal(err)
	}
	remote, err := self.Remote("kv")
	if err != nil {
		log.Fatal(err)
	}
	t, err := e.NewTransfer(self, engine.Write, engine.Route{})
	if err != nil {
		log.Fatal(err)
	}
	defer t.Close()
	if err := t.Add(region, 0, remote, 4<<10, 4<<10); err != nil {
		log.Fatal(err)
	}
	for range n {
		if err := t.Post(); err != nil {
			log.Fatal(err)
		}
		if t.Wait(context.Background()) != nil {
			failed++
		}
	}
	return failed
}
