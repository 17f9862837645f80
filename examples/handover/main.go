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
	// what suits the backend: peers reach it with one copy
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

// decode lends its memory to a peer that dials, and is told when something has come.
func decode(ctx context.Context, e *engine.Engine, region *engine.Region, socket string) error {
	l, err := engine.Listen("unix", socket) // only processes of this user are answered
	if err != nil {
		return err
	}
	go func() { _ = e.Serve(ctx, l) }()
	fmt.Println("serving")
	for {
		select {
		case note := <-e.Notifications():
			if note.Err != nil { // the last word about prefill
				fmt.Println("prefill has gone")
				return nil
			}
			// visible before the message is
			fmt.Printf("%s: %s\n", note.Data, region.Bytes()[4096:4096+15])
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// prefill writes into the memory of decode, and says so behind the bytes.
func prefill(ctx context.Context, e *engine.Engine, region *engine.Region, socket string) error {
	peer, err := e.Dial(ctx, "unix", socket)
	check(err)
	remote, err := peer.Remote("kv")
	check(err)
	copy(region.Bytes(), "keys and values")
	t, err := e.NewTransfer(peer, engine.Write, engine.Route{}) // made once, posted many times
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
