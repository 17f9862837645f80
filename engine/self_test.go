// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestSelfIsRenewed has the connection to itself break.
func TestSelfIsRenewed(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, 20*time.Millisecond)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	check(t, tr.Post())
	if err := tr.Wait(within(t)); !errors.Is(err, ErrTimeout) {
		t.Errorf("got %v", err)
	}
	<-p.Lost()
	q, err := p.e.Self()
	check(t, err)
	check(t, transfer(t, q, Write).Add(r, 0, remote(t, q, "r"), 0, 1))
	if n := p.e.Stats().Peers; n != 1 {
		t.Errorf("%d peers are known", n)
	}
	if names := q.Remotes(); len(names) != 1 || names[0] != "r" {
		t.Errorf("the own regions are %q", names)
	}
}

func TestSelfKnowsItsRegions(t *testing.T) {
	e := open(t, "e")
	p, err := e.Self()
	check(t, err)
	r := register(t, e, "r", 64)
	if names := p.Remotes(); len(names) != 1 || names[0] != "r" {
		t.Errorf("the own regions are %q", names)
	}
	remote(t, p, "r")
	check(t, r.Close())
	if names := p.Remotes(); len(names) != 0 {
		t.Errorf("closed, and still %q", names)
	}
}

// TestSelfForgetsRegions that are closed: a program that registers one for each request keeps none
// of them.
func TestSelfForgetsRegions(t *testing.T) {
	e := open(t, "e")
	p, err := e.Self()
	require.NoError(t, err)
	dst := register(t, e, "dst", 64)
	for i := range 10 {
		r := register(t, e, fmt.Sprint("request ", i), 64)
		tr := transfer(t, p, Read)
		check(t, tr.Add(dst, 0, remote(t, p, r.Name()), 0, 64))
		run(t, tr)
		check(t, tr.Close())
		check(t, r.Close())
	}
	require.Empty(t, p.remotes)
}
