// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"crypto/tls"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// openPinned opens a backend of which nothing was said but where it listens.
func openPinned(t *testing.T) *Backend {
	t.Helper()
	b, err := New(Config{Listen: "127.0.0.1:0", Handshake: limit})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b
}

// altered is an address with something changed, as a whole again.
func altered(t *testing.T, addr []byte, change func(*address)) []byte {
	t.Helper()
	a, err := decodeAddress(addr)
	require.NoError(t, err)
	change(&a)
	b, err := a.encode()
	require.NoError(t, err)
	return b
}

// TestKeyInTheAddress: two backends to which no identity was given know each other by the address
// alone, and what passes is encrypted.
func TestKeyInTheAddress(t *testing.T) {
	testkit.CheckLeaks(t)
	owner, near := openPinned(t), openPinned(t)
	p := dial(t, near, owner.Addr())
	for _, c := range p.conns {
		require.True(t, c.tls)
	}
	require.Contains(t, p.Explain(0, 0), "by the key in its address")
	_, secure, err := Places(owner.Addr())
	require.NoError(t, err)
	require.True(t, secure)
	worksFrom(t, openPinned(t), owner)
	require.NoError(t, p.Close())
}

// TestAnotherKey: a program that answers at the owner's address has not its key, and hears not even
// a hello.
func TestAnotherKey(t *testing.T) {
	testkit.CheckLeaks(t)
	owner, other, near := openPinned(t), openPinned(t), openPinned(t)
	theirs := altered(t, owner.Addr(), func(a *address) { a.places = other.address.places })
	_, err := near.Connect(t.Context(), theirs)
	require.ErrorIs(t, err, driver.ErrBadToken)
	require.ErrorContains(t, err, "another key than the address names")
}

// TestSecretOfTheAddress: who knows where an owner listens and has not its address is told nothing.
func TestSecretOfTheAddress(t *testing.T) {
	testkit.CheckLeaks(t)
	owner, near := openPinned(t), openPinned(t)
	guessed := altered(t, owner.Addr(), func(a *address) { a.pin.secret[0]++ })
	_, err := near.Connect(t.Context(), guessed)
	require.Error(t, err)
	raw := rawDial(t, owner)
	_, err = raw.Write(helloFrame(owner, 2))
	require.NoError(t, err)
	hungUp(t, "a hello in plain text", raw, 64)
	c := tls.Client(rawDial(t, owner), &tls.Config{InsecureSkipVerify: true})
	require.NoError(t, c.SetDeadline(time.Now().Add(limit)))
	require.NoError(t, writeFrame(c, header{kind: kindHello, count: 2}, owner.address.owner[:]))
	h, _, err := readFrame(c, kindWelcome)
	require.True(t, err != nil || h.status != 0, "a hello without the secret was welcomed")
}

// TestWaysThatDiffer names both, and the cure.
func TestWaysThatDiffer(t *testing.T) {
	ways := map[security]*Backend{plain: open(t, Config{}), pinned: openPinned(t),
		certified: open(t, Config{TLS: newAuthority().config(24 * time.Hour)})}
	for ours, near := range ways {
		for theirs, owner := range ways {
			if ours == theirs {
				continue
			}
			_, err := near.Connect(t.Context(), owner.Addr())
			require.ErrorIs(t, err, driver.ErrNotSupported)
			require.ErrorContains(t, err, ours.String())
			require.ErrorContains(t, err, theirs.String())
			require.ErrorContains(t, err, "set the same on both sides")
		}
	}
}
