// SPDX-License-Identifier: Apache-2.0

package fault_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// A program that writes ten times meets the two faults that the rules have for it.
func Example() {
	rules := []fault.Rule{
		// the fifth write, and the tenth
		{On: fault.Write, AtLeast: 4096, Every: 5, Do: fault.Fail(driver.ErrPeerLost)},
		{On: fault.Batch, Do: fault.Delay(100*time.Microsecond, 50*time.Microsecond)},
	}
	inner, err := mem.New(mem.Config{})
	if err != nil {
		log.Fatal(err)
	}
	b, err := fault.Wrap(inner, 7, rules...)
	if err != nil {
		log.Fatal(err)
	}
	e, err := engine.Open(engine.Config{Name: "example", Backends: []driver.Backend{b}})
	if err != nil {
		log.Fatal(err)
	}
	defer e.Close()
	fmt.Println(writes(e, 10), "writes failed")
	fmt.Println("the first rule fired", b.Fired()[0], "times")

	// Output:
	// 2 writes failed
	// the first rule fired 2 times
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
