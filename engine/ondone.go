// SPDX-License-Identifier: Apache-2.0

package engine

// OnDone has f called once for each Post, when that is done: for a program that serves many
// transfers from one place and wants no goroutine for each. Nil takes it away. It is called from
// whatever goroutine ended the transfer, perhaps before Post has returned, so it must not block and
// must not call the engine: it wakes a goroutine, which asks Done. By then the transfer may have
// been posted again. ErrBusy while it is posted.
func (t *Transfer) OnDone(f func()) error {
	if !t.look().atRest() {
		return t.misuse("change")
	}
	t.hook = f
	return nil
}
