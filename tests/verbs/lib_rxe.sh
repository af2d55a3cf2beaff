# A QEMU guest with Debian's kernel and its software RoCE (rxe), made from packages as they are on this machine; after lib_card.sh.
# rxe_need says what is missing (exit 77). rxe_build makes the guest in $RXE, rxe_boot COMMANDS_FILE runs it beside a TAP device.
RXE=$BUILD_DIR/rxe
RXE_GUEST=10.98.0.2 RXE_HOST=10.98.0.1
RXE_PROGRAMS="rdma ibv_uc_pingpong ib_write_bw ib_read_bw ib_send_bw ib_atomic_bw rping ucmatose udaddy"

rxe_need() {
	[ "$(uname -m)" = x86_64 ] || { echo "the guest is an x86_64 one"; exit 77; }
	[ "$(id -u)" = 0 ] || { echo "needs root for a TAP device"; exit 77; }
	[ -c /dev/net/tun ] || { echo "there is no /dev/net/tun here"; exit 77; }
	need qemu-system-x86_64 qemu-system-x86
	need busybox busybox-static
	need cpio cpio
	need modprobe kmod
	need ip iproute2
	need ib_write_bw perftest
	need rping rdmacm-utils
	need ibv_uc_pingpong ibverbs-utils
	ls /usr/lib/*/libibverbs/librxe-rdmav*.so >/dev/null 2>&1 || { echo "rxe's library is not installed (Debian: ibverbs-providers)"; exit 77; }
	ldd "$(command -v busybox)" >/dev/null 2>&1 && { echo "busybox isn't a static one (Debian: busybox-static)"; exit 77; }
	rxe_find_kernel || { echo "no kernel with rxe: put Debian's linux-image package into /var/cache/telpher (packaging/install-missing.sh check does)"; exit 77; }
}

# KERNEL_ROOT and KERNEL_VERSION of an installed kernel, or of a package that lies in the cache.
rxe_find_kernel() {
	local module package
	for module in /lib/modules/*/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko; do
		KERNEL_VERSION=${module#/lib/modules/} KERNEL_VERSION=${KERNEL_VERSION%%/*} KERNEL_ROOT=/
		[ -r "$module" ] && [ -r "/boot/vmlinuz-$KERNEL_VERSION" ] && return
	done
	for package in ${TELPHER_TEST_KERNEL:-} /var/cache/telpher/linux-image-*.deb; do
		[ -r "$package" ] || continue
		KERNEL_ROOT=$RXE/kernel
		if [ "$(cat "$RXE/package" 2>/dev/null)" != "$package $(stat -c %Y "$package")" ]; then
			rm -rf "$KERNEL_ROOT" && mkdir -p "$KERNEL_ROOT" || return
			# Only what the guest can need: the whole is 400 MB.
			dpkg-deb --fsys-tarfile "$package" | tar -x -C "$KERNEL_ROOT" --wildcards './boot/vmlinuz-*' './lib/modules/*/modules.*' \
				'*/kernel/drivers/infiniband/*' '*/kernel/drivers/virtio/*' '*/kernel/drivers/net/virtio_net.ko' '*/kernel/drivers/net/net_failover.ko' \
				'*/kernel/net/core/*' '*/kernel/net/ipv[46]/*' '*/kernel/crypto/*' '*/kernel/arch/x86/crypto/*' '*/kernel/fs/configfs/*' '*/kernel/lib/*' 2>/dev/null
			KERNEL_VERSION=$(ls "$KERNEL_ROOT/lib/modules") && depmod -b "$KERNEL_ROOT" "$KERNEL_VERSION" 2>/dev/null
			echo "$package $(stat -c %Y "$package")" >"$RXE/package"
		fi
		KERNEL_VERSION=$(ls "$KERNEL_ROOT/lib/modules") && [ -r "$KERNEL_ROOT/boot/vmlinuz-$KERNEL_VERSION" ] && return
	done
	return 1
}

rxe_build() {
	local root=$RXE/root name file module
	rm -rf "$root" && mkdir -p "$root"/{bin,dev,etc/libibverbs.d,modules,proc,sys,tmp} || return
	cp "$(command -v busybox)" "$root/bin/busybox"
	for name in sh mount mkdir insmod ip cat echo sleep grep tail seq poweroff; do ln -s busybox "$root/bin/$name"; done
	for name in $RXE_PROGRAMS; do cp "$(readlink -f "$(command -v $name)")" "$root/bin/$name" || return; done
	cp /etc/libibverbs.d/rxe.driver "$root/etc/libibverbs.d/"
	for file in /usr/lib/*/libibverbs/librxe-rdmav*.so; do install -D "$file" "$root$file"; done
	# pthread_exit loads libgcc_s by name.
	file=$(gcc -print-file-name=libgcc_s.so.1) && install -D "$file" "$root/lib/x86_64-linux-gnu/libgcc_s.so.1"
	for file in $(ldd "$root"/bin/* /usr/lib/*/libibverbs/librxe-rdmav*.so 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\/lib64/ { print $1 }' | sort -u); do
		install -D "$(readlink -f "$file")" "$root$file"
	done
	for module in virtio_pci virtio_net ib_uverbs rdma_ucm rdma_rxe crc32_generic; do
		modprobe -d "$KERNEL_ROOT" -S "$KERNEL_VERSION" --show-depends $module
	done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$RXE/modules" || return
	while read -r file; do
		cp "$file" "$root/modules/" && basename "$file" >>"$root/modules/order"
	done <"$RXE/modules"
	cat >"$root/init" <<-INIT
		#!/bin/sh
		export PATH=/bin
		mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mkdir /dev/shm
		for m in \$(cat /modules/order); do insmod /modules/\$m || echo "GUEST has no \$m"; done
		ip link set lo up; ip addr add $RXE_GUEST/24 dev eth0; ip link set eth0 up
		rdma link add rxe0 type rxe netdev eth0 && echo "GUEST is up"
		. /commands
		echo "GUEST ends"
		poweroff -f
	INIT
	chmod +x "$root/init"
	(cd "$root" && find . | cpio -o -H newc 2>/dev/null | gzip -1) >"$RXE/initrd"
}

# In the namespace whose TAP device is tap0. Its console goes to standard output.
rxe_boot() {
	local commands=$1 extra=$RXE/extra.$$
	mkdir -p "$extra" && cp "$commands" "$extra/commands" && (cd "$extra" && echo commands | cpio -o -H newc 2>/dev/null) >"$RXE/commands.cpio"
	rm -rf "$extra"
	# The one that isn't compressed goes first: archives must begin at a multiple of 4 bytes.
	cat "$RXE/commands.cpio" "$RXE/initrd" >"$RXE/initrd.whole"
	# Emulated, not virtualized: that works anywhere.
	exec timeout -k 5 "${RXE_SECONDS:-300}" qemu-system-x86_64 -M q35,accel=tcg -cpu max -smp 2 -m 512 -nodefaults -no-user-config -display none \
		-serial stdio -no-reboot -kernel "$KERNEL_ROOT/boot/vmlinuz-$KERNEL_VERSION" -initrd "$RXE/initrd.whole" \
		-append "console=ttyS0 quiet panic=-1 mitigations=off" -netdev tap,id=n0,ifname=tap0,script=no,downscript=no \
		-device virtio-net-pci,netdev=n0,mac=52:54:00:98:00:02,csum=off,gso=off,guest_csum=off,romfile=
}
