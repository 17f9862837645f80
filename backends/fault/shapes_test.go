// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"bytes"
	"os"
	"os/exec"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// The interfaces of a wrapped backend and of its connections, as they are asserted.
func backendHas(b any) int {
	_, r := b.(driver.Receiver)
	_, a := b.(driver.Armer)
	_, f := b.(driver.Fencer)
	_, c := b.(driver.Counting)
	_, l := b.(driver.Allocator)
	return bits(r, a, f, c, l)
}

func peerHas(p any) int {
	_, c := p.(driver.Canceler)
	_, g := p.(driver.Pager)
	_, d := p.(driver.Persister)
	_, n := p.(driver.Notifier)
	_, k := p.(driver.Counter)
	_, w := p.(driver.Watcher)
	_, h := p.(driver.Helper)
	_, x := p.(driver.Explainer)
	return bits(c, g, d, n, k, w, h, x)
}

// TestAssertionsTellTheTruth makes every combination of interfaces.
func TestAssertionsTellTheTruth(t *testing.T) {
	for mask, shape := range backendShapes {
		b := shape(&backend{})
		if got := backendHas(b); got != mask {
			t.Errorf("a backend with interfaces %05b has %05b", mask, got)
		}
		if _, ok := b.(Injector); !ok {
			t.Errorf("a backend with interfaces %05b is no Injector", mask)
		}
	}
	for mask, shape := range peerShapes {
		if got := peerHas(shape(&peer{})); got != mask {
			t.Errorf("a peer with interfaces %08b has %08b", mask, got)
		}
	}
	if len(backendShapes) != 1<<5 || len(peerShapes) != 1<<8 {
		t.Errorf("%d and %d shapes", len(backendShapes), len(peerShapes))
	}
}

// TestShapesFollowTheWrapped compares a wrapped backend with the one inside.
func TestShapesFollowTheWrapped(t *testing.T) {
	for name, open := range map[string]func() (driver.Backend, error){"mem": openMem, "shm": openShm} {
		inner, err := open()
		check(t, err)
		b, err := Wrap(inner, Rules{})
		check(t, err)
		outside := connect(t, b, b)
		inside := connect(t, inner, inner)
		if backendHas(b) != backendHas(inner) || peerHas(outside) != peerHas(inside) {
			t.Errorf("%s has %05b and %08b, wrapped %05b and %08b", name, backendHas(inner), peerHas(inside), backendHas(b), peerHas(outside))
		}
		check(t, inside.Close())
		check(t, b.Close())
	}
	if _, err := Wrap(nil, Rules{}); err == nil {
		t.Error("wrapped nothing")
	}
	inner, err := openMem()
	check(t, err)
	defer inner.Close()
	if _, err := Wrap(inner, Rules{List: []Rule{{}}}); err == nil {
		t.Error("wrapped with rules that cannot be")
	}
}

// TestShapesAreGenerated runs the generator.
func TestShapesAreGenerated(t *testing.T) {
	committed, err := os.ReadFile("shapes.go")
	check(t, err)
	source, err := os.ReadFile("shapes_generate.go")
	check(t, err)
	dir := t.TempDir()
	check(t, os.WriteFile(dir+"/main.go", source, 0o644))
	cmd := exec.Command("go", "run", dir+"/main.go")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	generated, err := os.ReadFile(dir + "/shapes.go")
	check(t, err)
	if !bytes.Equal(generated, committed) {
		t.Error("shapes.go is not what shapes_generate.go writes: run go generate ./backends/fault")
	}
}
