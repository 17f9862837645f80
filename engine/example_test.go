// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"context"
	"fmt"
	"log"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

func start(name string) (*engine.Engine, *engine.Region) {
	b, err := shm.New(shm.Config{})
	if err != nil {
		log.Fatal(err)
	}
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b}})
	if err != nil {
		log.Fatal(err)
	}
	memory, err := e.Alloc(1<<20, engine.AllocOptions{}) // what suits the backend
	if err != nil {
		log.Fatal(err)
	}
	region, err := e.Register("kv", memory.Segment())
	if err != nil {
		log.Fatal(err)
	}
	return e, region
}

// Two engines, here in one program: prefill writes 64 KiB into the memory of
// decode and tells it. Errors are left out below for brevity, not in your code.
func Example() {
	prefill, local := start("prefill")
	decode, arrived := start("decode")
	defer prefill.Close()
	defer decode.Close()

	description, _ := decode.Describe() // bytes: send them by any channel
	ctx := context.Background()
	peer, _ := prefill.Connect(ctx, description)
	remote, _ := peer.Remote("kv")

	copy(local.Bytes(), "keys and values")
	t, _ := prefill.NewTransfer(peer, engine.Write, engine.Route{}) // made once, posted many times
	_ = t.Add(local, 0, remote, 4096, 64<<10)
	_ = t.Notify([]byte("layer 0"))
	_ = t.Post()
	if err := t.Wait(ctx); err != nil {
		log.Fatal(err)
	}

	note := <-decode.Notifications() // the bytes are visible when it arrives
	fmt.Printf("%s: %s\n", note.Data, arrived.Bytes()[4096:4096+15])
	// Output: layer 0: keys and values
}
