// SPDX-License-Identifier: Apache-2.0

// Command handover moves host memory from one process to another. In two terminals:
//
//	go run ./examples/handover decode /tmp/kv.sock
//	go run ./examples/handover prefill /tmp/kv.sock
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

func main() {
	if len(os.Args) != 3 || (os.Args[1] != "decode" && os.Args[1] != "prefill") {
		log.Fatal("usage: handover decode|prefill socket")
	}
	role := map[string]func(context.Context, *engine.Engine, *engine.Region, string) error{
		"decode": decode, "prefill": prefill}[os.Args[1]]
	b, err := shm.New(shm.Config{})
	check(err)
	// the engine owns b
	e, err := engine.Open(engine.Config{Name: os.Args[1], Backends: []driver.Backend{b}})
	check(err)
	// memory that peers can map, so that a transfer is one copy
	memory, err := e.Alloc(1<<20, engine.AllocOptions{})
	check(err)
	region, err := e.Register("kv", memory.Segment())
	check(err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	check(role(ctx, e, region, os.Args[2]))
	check(e.Close())
	check(memory.Close())
}

// decode waits for a peer that dials, and prints the bytes that the peer wrote when its
// notification has arrived.
func decode(ctx context.Context, e *engine.Engine, region *engine.Region, socket string) error {
	l, err := engine.Listen("unix", socket) // refuses processes of other users
	if err != nil {
		return err
	}
	go func() { _ = e.Serve(ctx, l) }()
	fmt.Println("serving")
	for {
		select {
		case note := <-e.Notifications():
			if note.Err != nil { // the connection to prefill has ended
				fmt.Println("prefill has gone")
				return nil
			}
			// the bytes were visible before the notification arrived
			fmt.Printf("%s: %s\n", note.Data, region.Bytes()[4096:4096+15])
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// prefill writes into the memory of decode, with a notification that arrives after the bytes.
func prefill(ctx context.Context, e *engine.Engine, region *engine.Region, socket string) error {
	peer, err := e.Dial(ctx, "unix", socket)
	check(err)
	remote, err := peer.Remote("kv")
	check(err)
	copy(region.Bytes(), "keys and values")
	t, err := e.NewTransfer(peer, engine.Write, engine.Route{}) // make it once, post it many times
	check(err)
	check(t.Add(region, 0, remote, 4096, 64<<10))
	check(t.Notify([]byte("layer 0")))
	check(t.Post())
	return t.Wait(ctx)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
