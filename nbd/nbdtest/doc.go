// Package nbdtest holds an NBD server to its protocol from the outside: Client
// speaks the protocol byte by byte, also wrongly on purpose, and the functions on
// Target run other people's clients (nbdinfo, nbdcopy, nbdsh, qemu-img, qemu-io, fio) against
// an export. It shares no code with package nbd, so that an error there is not repeated here.
package nbdtest
