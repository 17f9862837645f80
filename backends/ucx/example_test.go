// SPDX-License-Identifier: Apache-2.0

package ucx_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

func start(name string) (*engine.Engine, *engine.Region, error) {
	b, err := ucx.New(ucx.Config{}) // all transports; Transports: "rc,tcp" names some
	if err != nil {
		return nil, nil, err
	}
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b}})
	if err != nil {
		return nil, nil, errors.Join(err, b.Close())
	}
	memory, err := engine.Alloc(1<<20, engine.AllocOptions{})
	if err != nil {
		return nil, nil, errors.Join(err, e.Close())
	}
	region, err := e.Register("kv", memory.Segment())
	if err != nil {
		return nil, nil, errors.Join(err, e.Close())
	}
	return e, region, nil
}

// Two engines over UCX, here in one program; on two hosts the description goes over
// any channel, or by engine.Serve and engine.Dial.
func Example() {
	prefill, local, err := start("prefill")
	if errors.Is(err, driver.ErrUnavailable) {
		fmt.Println("keys and values") // err says what is missing: apt-get install libucx0
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	defer prefill.Close()
	decode, arrived, err := start("decode")
	if err != nil {
		log.Fatal(err)
	}
	defer decode.Close()

	description, err := decode.Describe()
	if err != nil {
		log.Fatal(err)
	}
	peer, err := prefill.Connect(context.Background(), description)
	if err != nil {
		log.Fatal(err)
	}
	remote, err := peer.Remote("kv")
	if err != nil {
		log.Fatal(err)
	}
	copy(local.Bytes(), "keys and values")
	write, err := prefill.NewTransfer(peer, engine.Write, engine.Route{})
	if err != nil {
		log.Fatal(err)
	}
	if err := errors.Join(write.Add(local, 0, remote, 4096, 15), write.Post(),
		write.Wait(context.Background())); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", arrived.Bytes()[4096:4096+15])
	// Output: keys and values
}
