// SPDX-License-Identifier: Apache-2.0

// Command lease leases a range of memory to a peer and revokes the lease. Once Revoke has returned,
// no write of the peer can land there, so the owner may use the range for another request.
//
//	go run ./examples/lease
package main

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

func main() {
	holder, local := open("holder", (*engine.Engine).Register)
	// not in the description: peers reach it only by leases
	owner, cache := open("owner", (*engine.Engine).RegisterPrivate)
	defer holder.Close()
	defer owner.Close()
	ctx := context.Background()
	description, err := owner.Describe()
	check(err)
	peer, err := holder.Connect(ctx, description)
	check(err)

	// lease whole pages if possible; TTL limits the time of the lease
	lease, err := cache.Lease(8192, 4096, engine.LeaseOptions{})
	check(err)
	remote, err := peer.Import(lease.Token()) // the owner sends these bytes with the request
	check(err)

	t, err := holder.NewTransfer(peer, engine.Write, engine.Route{})
	check(err)
	copy(local.Bytes(), "mine")
	check(t.Add(local, 0, remote, 0, 4)) // offsets count from the start of the lease
	if err := t.Add(local, 0, remote, 4096, 1); errors.Is(err, engine.ErrBounds) {
		fmt.Println("past its end: refused")
	}
	check(t.Post())
	check(t.Wait(ctx))
	fmt.Printf("before: %s\n", cache.Bytes()[8192:8196])

	check(lease.Revoke(ctx)) // works even if the peer is frozen or dead
	copy(cache.Bytes()[8192:], "ours")
	check(t.Post())
	if err := t.Wait(ctx); errors.Is(err, engine.ErrRevoked) {
		fmt.Println("after Revoke: refused")
	}
	fmt.Printf("after: %s\n", cache.Bytes()[8192:8196])
}

// register is one of the two ways to make memory known.
type register func(*engine.Engine, string, driver.Segment) (*engine.Region, error)

func open(name string, add register) (*engine.Engine, *engine.Region) {
	b, err := shm.New(shm.Config{})
	check(err)
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b}})
	check(err)
	memory, err := e.Alloc(1<<20, engine.AllocOptions{}) // freed when the process ends
	check(err)
	region, err := add(e, "kv", memory.Segment())
	check(err)
	return e, region
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
